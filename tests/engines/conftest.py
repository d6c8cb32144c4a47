"""Assertions of the contract suite tell what they compared, as those in test modules do."""

import pytest

pytest.register_assert_rewrite("tests.engines.contract", "tests.engines.contract_of_slots")
