"""Pages that change something, tried by hand with the session of a key that may only look."""

from store.tables import Base
from tenants.rights import Role
from tests.api.dashboard.test_doors import _filled
from tests.api.dashboard.visits import key_of, routes, visitor
from tests.api.worlds import opened_world

OWN = {
    "/ui/login",
    "/ui/login/code",
    "/ui/logout",
    "/ui/sessions/{number}/end",
    "/ui/sessions/others/end",
    "/ui/policy-reports",
}
"""Forms that are for everybody."""


async def test_a_viewer_is_refused_by_every_form_that_changes_something(service, cats, dogs) -> None:
    """The server asks for the scope, whatever the page shows. An admin's request of the same kind is let in."""
    async with opened_world(service, cats, dogs) as world:
        viewer, manager = await key_of(service, cats, Role.VIEWER), await key_of(service, cats)
        async with visitor(service, viewer.secret) as http, visitor(service, manager.secret) as admin:

            async def rows() -> list[str]:
                async with service.database.read() as session:
                    return [
                        str(row)
                        for table in Base.metadata.sorted_tables
                        for row in await session.execute(table.select())
                    ]

            before, asked = await rows(), 0
            for path, route in routes(service):
                if path in OWN or not route.methods - {"GET", "HEAD"}:
                    continue
                place = _filled(path.replace("{number}", str(manager.id)), world.own)
                answer = await http.post(place, data={"note": "x"})
                assert (answer.status_code, "this needs" in answer.text) == (403, True), path
                asked += 1
            assert asked >= 20
            assert await rows() == before
            assert (await admin.post("/ui/projects", data={"name": "whiskers"})).status_code == 303
