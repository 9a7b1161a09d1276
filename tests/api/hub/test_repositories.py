"""Tokenizer files in the hub's form: to any key holder, by exact names, and never a weight."""

import hashlib
import json
from pathlib import Path

import httpx
import pytest
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import RemoteEntryNotFoundError, RepositoryNotFoundError

from api.tokenizer_repositories import tokenizer_repositories
from contracts.base_model import BaseModelFacts
from contracts.tokenizer_ids import is_repository_id, sdk_tokenizer_id
from tests.api.conftest import BASE, Service, Tenant

FILES = {
    "config.json": None,
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tools.jinja": b"{{ tools }}",
}
PRIVATE = ["model.safetensors", "pytorch_model.bin", "notes.txt", "other/tokenizer.json", ".env"]


@pytest.fixture
def base_model(base_model: Path) -> Path:
    """A base with tokenizer files, weights and other files."""
    (base_model.parent / "secret.json").write_bytes(b"outside")
    for name, content in [*FILES.items(), *((name, b"private") for name in PRIVATE)]:
        if content is not None:
            (base_model / name).parent.mkdir(exist_ok=True)
            (base_model / name).write_bytes(content)
    return base_model


def client(service: Service, tenant: Tenant | None) -> httpx.AsyncClient:
    """Return a client that sends the key as a hub's client does."""
    headers = {} if tenant is None else {"Authorization": f"Bearer {tenant.key}"}
    return httpx.AsyncClient(base_url=service.url, headers=headers, timeout=40)


async def test_a_file_says_its_commit_its_size_and_the_digest_of_its_content(
    service: Service, cats: Tenant, dogs: Tenant
) -> None:
    commits = set()
    for tenant in (cats, dogs):
        async with client(service, tenant) as http:
            for revision in ("main", "0" * 40):
                url = f"/{BASE}/resolve/{revision}/tokenizer.json"
                head, got = await http.head(url), await http.get(url)
                assert (head.status_code, head.content, got.content) == (200, b"", FILES["tokenizer.json"])
                digest = hashlib.sha256(got.content).hexdigest()
                assert head.headers["etag"] == got.headers["etag"] == f'"{digest}"'
                assert int(head.headers["content-length"]) == int(head.headers["x-linked-size"]) == len(got.content)
                commits.add(head.headers["x-repo-commit"])
    assert [len(commit) for commit in commits] == [40]


async def test_a_stranger_gets_nothing(service: Service) -> None:
    async with client(service, None) as http:
        for url in (f"/{BASE}/resolve/main/config.json", f"/api/models/{BASE}", f"/api/models/{BASE}/tree/main"):
            assert (await http.get(url)).status_code == 401


async def test_the_hub_s_own_client_lists_and_downloads(service: Service, cats: Tenant, tmp_path: Path) -> None:
    def ask() -> None:
        api = HfApi(endpoint=service.url, token=cats.key)
        info = api.model_info(BASE)
        assert [one.rfilename for one in info.siblings or ()] == sorted(FILES)
        assert api.model_info(BASE, revision="main").sha == info.sha
        tree = [one.path for one in api.list_repo_tree(BASE, recursive=True)]
        assert sorted(tree) == sorted([*FILES, "additional_chat_templates"])
        inner = [one.path for one in api.list_repo_tree(BASE, "additional_chat_templates")]
        assert inner == ["additional_chat_templates/tools.jinja"]
        found = api.snapshot_download(BASE, cache_dir=tmp_path / "cache")
        assert (Path(found) / "chat_template.jinja").read_bytes() == FILES["chat_template.jinja"]
        with pytest.raises(RemoteEntryNotFoundError):
            hf_hub_download(BASE, "model.safetensors", endpoint=service.url, token=cats.key, cache_dir=tmp_path / "c")
        with pytest.raises(RepositoryNotFoundError):
            api.model_info("gpt2")

    await service.services.admission.threads.run(cats.id, ask)


HOSTILE = [
    *PRIVATE,
    "../secret.json",
    "..%2Fsecret.json",
    "%2e%2e/secret.json",
    "/etc/passwd",
    "%2Fetc%2Fpasswd",
    "additional_chat_templates/../model.safetensors",
    "additional_chat_templates%2F..%2F..%2Fsecret.json",
    "Config.json",
    "",
    "x" * 4000,
    "%0d%0aSet-Cookie:a=b",
]


@pytest.mark.parametrize("file", HOSTILE)
async def test_nothing_but_a_tokenizer_file_can_be_asked_for(service: Service, cats: Tenant, file: str) -> None:
    async with client(service, cats) as http:
        answer = await http.get(f"{service.url}/{BASE}/resolve/main/{file}")
        assert (answer.status_code, b"private" in answer.content, b"outside" in answer.content) == (404, False, False)
        assert "set-cookie" not in answer.headers
        tree = await http.get(f"{service.url}/api/models/{BASE}/tree/main/{file}")
        assert b"private" not in tree.content


@pytest.mark.parametrize("repository", ["other/tiny", "..", "../tiny", "test", "test/tiny/x", "api/v1"])
async def test_another_repository_is_none(service: Service, cats: Tenant, repository: str) -> None:
    async with client(service, cats) as http:
        for url in (f"/{repository}/resolve/main/config.json", f"/api/models/{repository}"):
            answer = await http.get(f"{service.url}{url}")
            assert answer.status_code == 404
        if ".." not in repository:
            assert answer.headers["x-error-code"] == "RepoNotFound"
            assert answer.json()["code"] == "not_found"


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("gpt2", "gpt2"),
        ("my/tiny", "my/tiny"),
        ("my/tiny/instruct", "my/tiny"),
        ("my/tiny:free", "my/tiny"),
        ("meta-llama/Llama-3.1-8B", "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"),
        ("/models/foo", None),
        ("./tiny", None),
    ],
)
def test_a_base_is_found_under_the_id_that_the_sdk_makes_from_its_name(
    tmp_path: Path, name: str, asked: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    facts = BaseModelFacts(name, tmp_path, "any", context_length=1, vocabulary_size=1, tokenizer_id=None)
    found = tokenizer_repositories({name: facts})
    made = sdk_tokenizer_id(name)
    assert (made if is_repository_id(made) else None) == asked
    assert (asked in found) == (asked is not None)
    assert all(is_repository_id(id) for id in found)


def test_of_two_bases_with_one_id_the_one_of_that_very_name_wins(tmp_path: Path) -> None:
    bases = {}
    for number, name in enumerate(("a/b", "a/b/c", "x/y/1", "x/y/2")):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "config.json").write_text(str(number))
        path = tmp_path / str(number)
        bases[name] = BaseModelFacts(name, path, "any", context_length=1, vocabulary_size=1, tokenizer_id=None)
    found = tokenizer_repositories(bases)
    assert {id: one.files["config.json"].path.read_text() for id, one in found.items()} == {"a/b": "0", "x/y": "2"}
