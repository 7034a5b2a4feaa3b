"""Fixtures for tests of code that runs on anyio."""

from collections.abc import Awaitable, Callable

import anyio
import pytest

Main = Callable[[], Awaitable[None]]


@pytest.fixture(params=["trio", "asyncio"])
def run(request: pytest.FixtureRequest) -> Callable[[Main], None]:
    """Run a test on each backend, within 10 s."""

    def run_it(main: Main) -> None:
        async def limited() -> None:
            with anyio.fail_after(10):
                await main()

        anyio.run(limited, backend=request.param)

    return run_it
