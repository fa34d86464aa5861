"""One warm process per worker of pytest."""

from collections.abc import Iterator

import pytest

from .judge import Judge


@pytest.fixture(scope="session")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    found = Judge(tmp_path_factory.mktemp("learner"))
    yield found
    found.close()
