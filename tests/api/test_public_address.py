"""Download links lead to this service and to no other, whatever a request's headers claim."""

import httpx
import pytest

from store.settings import Settings

CHECKPOINT = "checkpoints/weights/ck1"
SECURE = {"X-Forwarded-Proto": "https", "X-Forwarded-Host": "evil.example", "X-Forwarded-For": "203.0.113.9"}


async def _asked(tenant, **headers: str) -> httpx.Response:
    run = await tenant.run()
    await tenant.checkpoint(run, "ck1")
    return await tenant.http.get(f"/training_runs/{run}/{CHECKPOINT}/archive", headers=headers)


async def test_a_forged_host_gets_no_link(cats, dogs) -> None:
    for host in ("evil.example", "127.0.0.1@evil.example", "localhost.evil.example:80", "10.9.8.7", "[::2]", "a/b", ""):
        answer = await _asked(cats, Host=host)
        assert answer.status_code == 400, host
        assert "WEFT_PUBLIC_URL" in answer.json()["detail"]
        assert "location" not in answer.headers
    theirs = await _asked(dogs)
    assert theirs.headers["location"].startswith(f"{dogs.service.url}/api/v1/downloads/")


async def test_forwarded_headers_of_a_stranger_are_ignored(cats) -> None:
    answer = await _asked(cats, **SECURE)
    assert answer.headers["location"].startswith(f"{cats.service.url}/api/v1/downloads/")


class TestBehindAProxy:
    """A proxy on loopback that ends TLS and passes the name on that clients use."""

    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        given = {"trusted_proxies": ("127.0.0.0/8",), "trusted_hosts": ("weft.example",)}
        return Settings.model_validate({**settings.model_dump(), **given})

    async def test_a_link_is_https_and_has_the_clients_name_for_the_service(self, cats) -> None:
        answer = await _asked(cats, **SECURE, Host="weft.example:8443")
        assert answer.headers["location"].startswith("https://weft.example:8443/api/v1/downloads/")

    async def test_a_forged_host_gets_no_link(self, cats) -> None:
        assert (await _asked(cats, **SECURE, Host="evil.example")).status_code == 400


class TestWithAPublicUrl:
    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        return settings.model_copy(update={"public_url": "https://weft.example/tinker/"})

    async def test_every_link_begins_with_it(self, cats) -> None:
        answer = await _asked(cats, Host="evil.example")
        assert answer.headers["location"].startswith("https://weft.example/tinker/api/v1/downloads/")
        run = await cats.run(model_seq_id=1)
        await cats.checkpoint(run, "ck1")
        listed = await cats.http.get(f"/training_runs/{run}/{CHECKPOINT}/external_weights_urls")
        urls = listed.json()["urls"]
        assert list(urls) == ["adapter_model.safetensors"]
        assert all(url.startswith("https://weft.example/tinker/api/v1/downloads/") for url in urls.values())


async def test_no_page_of_the_api_loads_scripts(service) -> None:
    async with httpx.AsyncClient(base_url=service.url, timeout=40) as http:
        for path in ("/docs", "/redoc", "/openapi.json", "/docs/oauth2-redirect"):
            assert (await http.get(path)).status_code == 404, path
