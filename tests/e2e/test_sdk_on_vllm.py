"""The whole story of the unmodified SDK where a real vLLM server samples, for two tenants at once."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.e2e.conftest import Service
from tests.e2e.test_data_folder import check_folders
from tests.e2e.test_sdk import check_story


def test_two_tenants_train_sample_list_download_and_delete_on_vllm(
    vllm_service: Service, run_flow: Callable[..., dict[str, Any]]
) -> None:
    keys = (vllm_service.key, vllm_service.other_key)
    with ThreadPoolExecutor(len(keys)) as threads:
        stories = list(threads.map(lambda key: run_flow(vllm_service.base_url, key), keys))
    for seen in stories:
        check_story(seen)
    assert len({seen["run"] for seen in stories}) == 2
    check_folders(vllm_service)
