"""What a step may say, by CUDA kernels."""

import pytest
from test_steps import GROUPS, KINDS, NORMS, check_forms, check_norms


@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.parametrize("kind", range(len(KINDS)), ids=KINDS)
def test_forms_are_those_of_pytorch(kind, group):
    check_forms(kind, group, "cuda")


@pytest.mark.parametrize("group", range(3))
def test_norms_of_keys_and_states(group):
    check_norms([*NORMS][group::3], "cuda")
