"""Every module of `torch.nn` in PyTorch's own database, deferred and eager."""

from __future__ import annotations

import warnings

import pytest
import torch
from common import assert_defers_exactly
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_dtype import floating_and_complex_types_and
from torch.testing._internal.common_modules import ModuleInfo, module_db, modules
from torch.testing._internal.common_utils import TestCase, run_tests


class TestModules(TestCase):
    @pytest.mark.cases(120)
    # `make_tensor()` has no complex32.
    @modules(module_db, allowed_dtypes=floating_and_complex_types_and(torch.float16, torch.bfloat16))
    def test_materializes_identical_to_eager(
        self, device: str, dtype: torch.dtype, module_info: ModuleInfo, training: bool
    ) -> None:
        inputs = module_info.module_inputs_func(
            module_info, device=device, dtype=dtype, requires_grad=False, training=training
        )
        for module_input in inputs:
            constructor = module_input.constructor_input
            with self.subTest(constructor=str(constructor)), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # advice about the arguments, not about deferral
                assert_defers_exactly(lambda c=constructor: module_info.module_cls(*c.args, **c.kwargs))  # type: ignore[misc]


instantiate_device_type_tests(TestModules, globals(), only_for="cpu")

if __name__ == "__main__":
    run_tests()
