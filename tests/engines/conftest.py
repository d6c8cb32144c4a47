"""Rewrite the assertions of the contract suite, so that they report values as those of test modules do."""

import pytest

pytest.register_assert_rewrite("tests.engines.contract", "tests.engines.contract_of_slots")
