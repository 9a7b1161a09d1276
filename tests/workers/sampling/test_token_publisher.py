"""Tokens that followers have missed are published again: no others, and no more at a time than one tenant may have."""

from ledger.token_feed import TokenFeed
from tests.workers.sampling.long_samples import Follower, LongSample
from workers.sampling.continuation import Continuation
from workers.sampling.token_publisher import AGAIN_A_SECOND, AGAIN_AT_ONCE, TokenPublisher


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_follower_gets_what_it_lacks_from_its_own_place_on() -> None:
    feed = TokenFeed()
    publisher = TokenPublisher(feed, Clock())
    cat, dog = LongSample("cat", 0, sequences=2), LongSample("dog", 0)
    with feed.follow(cat.key) as mine, feed.follow(dog.key) as theirs:
        follower, beside = Follower(feed, cat, mine), Follower(feed, dog, theirs)
        for number in range(40):
            cat.draw(publisher)
            dog.draw(publisher)
            beside.read()
            if 20 <= number < 23:
                follower.forget()
            follower.read()
        assert follower.heard(0) == follower.heard(1) == cat.whole
        # The gap is seen with the 24th token; the next one brings what was lost, once.
        again = [part for part in follower.came if len(part.tokens) > 1]
        assert [(part.sequence, part.start, len(part.tokens)) for part in again] == [(0, 20, 5), (1, 20, 5)]
        assert [part.start for part in beside.came] == list(range(40))


def test_a_sample_that_another_process_took_up_is_published_from_there_on() -> None:
    feed = TokenFeed()
    cat, dog = LongSample("cat", 3000), LongSample("dog", 5)
    with feed.follow(cat.key) as mine, feed.follow(dog.key) as theirs:
        for sample in (cat, dog):
            sample.draw(TokenPublisher(feed, Clock()))
        assert [(part.start, part.tokens) for part in mine.get_nowait()] == [(3000, [3000])]
        assert [(part.start, part.tokens) for part in theirs.get_nowait()] == [(5, [5])]


def test_a_tenants_long_samples_come_again_at_its_pace_and_anothers_gap_is_closed_at_once() -> None:
    feed, clock = TokenFeed(), Clock()
    publisher = TokenPublisher(feed, clock)
    cat, dog = LongSample("cat", 50_000, sequences=4), LongSample("dog", 1000)
    with feed.follow(cat.key) as mine, feed.follow(dog.key) as theirs:
        follower, beside = Follower(feed, cat, mine), Follower(feed, dog, theirs)
        for number in range(100):
            for sample, reader in ((cat, follower), (dog, beside)):
                sample.draw(publisher)
                reader.read()
            if number:
                assert beside.heard() == dog.whole
        came = sum(len(part.tokens) for part in follower.came)
        assert came <= 4 * 100 + AGAIN_AT_ONCE
        while len(follower.heard(3)) < len(cat.whole):
            before = sum(len(part.tokens) for part in follower.came)
            clock.now += 0.1
            cat.draw(publisher)
            follower.read()
            assert sum(len(part.tokens) for part in follower.came) - before <= 4 + AGAIN_A_SECOND / 10 + 1
        assert [follower.heard(sequence) for sequence in range(4)] == [cat.whole] * 4
        spent = clock.now - 100.0
        assert spent >= (200_000 - AGAIN_AT_ONCE) / AGAIN_A_SECOND - 1


def test_places_that_no_follower_can_have_are_no_error() -> None:
    """A message from outside may hold any number."""
    feed = TokenFeed()
    publisher, cat, dog = TokenPublisher(feed, Clock()), LongSample("cat", 3), LongSample("dog", 3)
    with feed.follow(cat.key) as mine, feed.follow(dog.key) as theirs:
        feed.ask_again(cat.key, {-1: 0, 7: 0, 0: -5})
        feed.ask_again(dog.key, {0: 10**9})
        cat.draw(publisher)
        dog.draw(publisher)
        assert [(part.start, part.tokens) for part in mine.get_nowait()] == [(0, [0, 1, 2, 3])]
        assert [(part.start, part.tokens) for part in theirs.get_nowait()] == [(3, [3])]


def test_what_nobody_follows_any_more_is_not_remembered() -> None:
    feed = TokenFeed()
    cat, dog = LongSample("cat", 3), LongSample("dog", 3)
    with feed.follow(dog.key):
        with feed.follow(cat.key):
            for sample in (cat, dog):
                feed.ask_again(sample.key, {0: 0})
        assert feed.take_asked_again(cat.key) == {}
        assert feed.take_asked_again(dog.key) == {0: 0}


def test_sequences_without_a_gap_come_before_those_that_lack_many_tokens() -> None:
    sample = LongSample("cat", 100, sequences=2)
    continuation: Continuation = sample.continuation
    feed = TokenFeed()
    sample.draw(TokenPublisher(feed, Clock()))
    continuation.publish_again({0: 10})
    sample.draw(TokenPublisher(feed, Clock()))
    continuation.publish_again({0: 10, 1: 101})
    assert [(one.sequence, one.start, len(one.tokens)) for one in continuation.new_tokens(31)] == [
        (1, 101, 1),
        (0, 10, 30),
    ]
    assert [(one.sequence, one.start, len(one.tokens)) for one in continuation.new_tokens(1000)] == [(0, 40, 62)]
