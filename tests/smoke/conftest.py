"""The farm and the models, once for all tests of smoke runs."""

from __future__ import annotations

import pytest
from smoke.farm import Farm


@pytest.fixture(scope="session")
def farm():
    with Farm() as started:
        yield started


@pytest.fixture(scope="session")
def models(farm, tmp_path_factory):
    """Directory with a model of every kind."""
    directory = tmp_path_factory.mktemp("models")
    farm.call("smoke.makers:make", str(directory))
    return directory
