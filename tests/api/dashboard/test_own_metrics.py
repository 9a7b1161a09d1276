"""A run's own metrics on its page: the last value of each, and a file of all, of the tenant's alone."""

from tests.api.dashboard.visits import visitor


async def test_the_page_tells_each_metrics_last_value_and_the_file_has_all(service, cats, dogs) -> None:
    run, theirs = await cats.run(), await dogs.run()
    for tenant, of_run in ((cats, run), (dogs, theirs)):
        points = [{"step": step, "metrics": {"reward": step / 4, "=loss": None}} for step in range(3)]
        points.append({"step": 9, "metrics": {"late": 2.5}})
        answer = await tenant.http.post(f"{service.url}/api/weft/v1/runs/{of_run}/points", json={"points": points})
        answer.raise_for_status()
    async with visitor(service, cats.key) as http:
        page = (await http.get(f"/ui/runs/{run}")).text
        shown = {name: page.partition(f'data-series="metric:{name}"')[2][:400] for name in ("reward", "=loss", "late")}
        assert "data-last>0.5<" in shown["reward"]
        assert "data-step>2<" in shown["reward"]
        assert "data-last>–<" in shown["=loss"]
        assert "data-last>2.5<" in shown["late"]
        lines = (await http.get(f"/ui/runs/{run}/metrics.csv")).text.splitlines()
        assert [line.split(",")[0] for line in lines] == ["name", *["'=loss"] * 3, "late", *["reward"] * 3]
        assert (await http.get(f"/ui/runs/{theirs}/metrics.csv")).status_code == 404
