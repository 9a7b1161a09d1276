// What comes to a run's page while it is seen: by a stream or, where another page of the session took that, by a look every few seconds.
import { curveAddress, readJson, tellFailure } from "./curves.js";

const RETRY_MS = 3000;
const LOOK_MS = 5000;

export class RunStream {
  /**
   * ``root`` has the run's address, and tells the state as ``data-live``. ``page`` has ``seen()``, the last step that it has, takes
   * ``points``, ``marks`` and a ``standing``, and reads anew, in ``reset()``, what is too much for a stream.
   */
  constructor(root, page) {
    Object.assign(this, { root, page, base: root.dataset.url, stream: null, timer: 0, look: null });
    this.notice = document.querySelector("[data-displaced]");
    // A browser opens six connections to a server: a page that nobody sees keeps none.
    document.addEventListener("visibilitychange", () => (document.hidden ? this.close() : this.follow()));
    addEventListener("focus", () => this.look && this.follow());
  }

  /** Follow the run by a stream, if the page is seen and has none. */
  follow() {
    if (document.hidden || this.stream) return;
    this.close();
    const opened = new EventSource(`${this.base}/events?after=${this.page.seen()}`);
    this.stream = opened;
    opened.addEventListener("open", () => {
      this.root.dataset.live = "open";
      dispatchEvent(new Event("weft:reached"));
    });
    opened.addEventListener("points", (event) => this.page.points(JSON.parse(event.data)));
    opened.addEventListener("marks", (event) => this.page.marks(JSON.parse(event.data)));
    opened.addEventListener("standing", (event) => this.page.standing(JSON.parse(event.data)));
    opened.addEventListener("reset", () => this.stream === opened && this.readAgain());
    opened.addEventListener("displaced", () => this.stream === opened && this.lookOn());
    opened.addEventListener("error", () => this.stream === opened && this.broken(opened));
  }

  close() {
    clearTimeout(this.timer);
    if (this.stream) this.stream.close();
    this.stream = this.look = null;
    this.notice.hidden = true;
    this.root.dataset.live = "closed";
  }

  broken(opened) {
    this.root.dataset.live = "closed";
    // The browser goes on by itself, but for an answer that is no stream. Such a one cannot be looked at: another tells why.
    if (opened.readyState !== EventSource.CLOSED) {
      dispatchEvent(new Event("weft:unreached"));
      return;
    }
    this.stream = null;
    this.followLater();
    this.askWhy();
  }

  followLater() {
    this.timer = setTimeout(() => this.follow(), RETRY_MS);
  }

  /** Tell why there is no stream: a session that has ended has no answer to this either. */
  async askWhy() {
    try {
      await readJson(`${curveAddress(this.base, "mean_loss", false)}&begin=0&end=1`);
      dispatchEvent(new Event("weft:unreached"));
    } catch (error) {
      tellFailure(error);
    }
  }

  /** Have the page read anew, since the stream does not send what is missing, and follow from there. */
  async readAgain() {
    this.close();
    try {
      await this.page.reset();
    } catch {
      // The next stream tells again what is missing.
    }
    this.followLater();
  }

  /** Look every few seconds until the person turns to this page again: taking the stream back would end another page's. */
  lookOn() {
    this.close();
    this.notice.hidden = false;
    this.root.dataset.live = "looks";
    const look = (this.look = async () => {
      try {
        const news = await readJson(`${this.base}/news?after=${this.page.seen()}`);
        if (this.look !== look) return;
        this.page.points(news.points);
        this.page.marks(news.marks);
        this.page.standing(news.standing);
        dispatchEvent(new Event("weft:reached"));
      } catch (error) {
        if (this.look === look) tellFailure(error);
      }
      if (this.look === look) this.timer = setTimeout(look, LOOK_MS);
    });
    this.timer = setTimeout(look, LOOK_MS);
  }
}
