"""Assertions of the shared judge show what they compared."""

import pytest

pytest.register_assert_rewrite("trainers.judges")
