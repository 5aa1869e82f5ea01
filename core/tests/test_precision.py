"""Marked parameters keep their dtype and every bit through casts of their module, or the loss is an error."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from isthmus.launch import run
from isthmus.precision import enforce_marked_param_dtypes, mark_param_dtype, marked_dtype

# None of these is a bfloat16 or float16 value; NaN and -0.0 must keep their bits as well.
FINE = torch.tensor([1 / 3, -0.1, 3.14159, 1e-30, float("nan"), -0.0])


class Layer(nn.Module):
    """A marked parameter beside one that may be cast."""

    def __init__(self, values: torch.Tensor = FINE):
        super().__init__()
        self.decay = nn.Parameter(values.clone())
        self.weight = nn.Parameter(torch.ones(3))
        mark_param_dtype(self.decay, torch.float32)


def bits(tensor: torch.Tensor) -> list[int]:
    assert tensor.dtype == torch.float32
    return tensor.detach().view(torch.int32).tolist()


@pytest.mark.parametrize("cast", [nn.Module.bfloat16, nn.Module.half])
def test_a_cast_of_the_module_loses_no_bit_of_a_marked_parameter(cast):
    layer = Layer()
    cast(layer)
    assert layer.decay.dtype != torch.float32, "the test needs a cast that reaches the parameter"
    assert enforce_marked_param_dtypes([layer]) == ["decay"]
    assert bits(layer.decay) == bits(FINE)
    assert layer.decay.keep_in_fp32
    assert layer.weight.dtype != torch.float32


def test_widening_what_a_cast_rounded_would_not_do():
    values = torch.tensor([1 / 3])
    layer = Layer(values).bfloat16()
    assert bits(layer.decay.detach().float()) != bits(values)
    enforce_marked_param_dtypes([layer])
    assert bits(layer.decay) == bits(values)


def test_values_written_between_mark_and_cast_are_the_exact_ones():
    layer = Layer(torch.zeros(6))
    with torch.no_grad():
        layer.decay.copy_(FINE)
    enforce_marked_param_dtypes([layer.bfloat16()])
    assert bits(layer.decay) == bits(FINE)


def test_a_second_cast_and_enforcement_lose_nothing_either():
    layer = Layer()
    for _ in range(2):
        layer.bfloat16()
        enforce_marked_param_dtypes([layer])
        enforce_marked_param_dtypes([layer])
        with torch.no_grad():
            layer.decay[0] += 1 / 7  # a training step's change is exact, too
    expected = FINE.clone()
    expected[0] += 1 / 7
    assert bits(layer.decay)[1:] == bits(FINE)[1:]
    layer.bfloat16()
    expected[0] += 1 / 7
    enforce_marked_param_dtypes([layer])
    assert bits(layer.decay) == bits(expected)


def test_a_value_changed_after_the_cast_is_an_error_that_names_it_and_changes_nothing():
    model = nn.ModuleDict({str(i): Layer() for i in range(3)}).bfloat16()
    with torch.no_grad():
        for i in "01":
            model[i].decay.fill_(2.0)
    with pytest.raises(ValueError, match=r"\{0\.\.1\}\.decay: was changed after the cast to torch.bfloat16"):
        enforce_marked_param_dtypes([model])
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_keep_in_fp32_without_a_mark_cannot_be_restored():
    layer = Layer()
    layer.weight.keep_in_fp32 = True  # as a later megatron-core marks it
    assert marked_dtype(layer.weight) == torch.float32
    assert enforce_marked_param_dtypes(layer) == ["decay", "weight"]
    with pytest.raises(ValueError, match=r"weight: was cast to torch.bfloat16 with no exact value held"):
        enforce_marked_param_dtypes(layer.bfloat16())


def test_a_load_into_an_enforced_parameter_is_exact():
    layer = Layer(torch.zeros(6)).bfloat16()
    enforce_marked_param_dtypes([layer])
    with torch.no_grad():
        layer.decay.copy_(FINE)
    enforce_marked_param_dtypes([layer])
    assert bits(layer.decay) == bits(FINE)


def test_a_bf16_parameter_becomes_fp32_when_marked():
    parameter = nn.Parameter(FINE.bfloat16())
    mark_param_dtype(parameter, torch.float32)
    assert bits(parameter) == bits(FINE.bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32])
def test_a_mark_that_would_round_is_refused(dtype):
    with pytest.raises(ValueError, match="values would be rounded"):
        mark_param_dtype(nn.Parameter(torch.ones(2)), dtype)


def test_parameters_on_the_meta_device_keep_their_dtype():
    layer = Layer(FINE.to("meta"))
    enforce_marked_param_dtypes([layer.bfloat16()])
    assert layer.decay.dtype == torch.float32
    assert layer.decay.is_meta


def wrapped_by_megatron(replace: bool) -> tuple[list[int], str, list[str]]:
    """The marked bits and the error of enforcing too late, where the values arrived in a new `.data`."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, bf16=True)
    layer = Layer(torch.zeros(6))
    if replace:
        layer.decay.data = FINE.clone()
    else:
        layer.decay.data.copy_(FINE)
    model = Float16Module(config, layer)  # Megatron's own, as its training loop calls it
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    ddp = DistributedDataParallel(config, ddp_config, model)
    names = enforce_marked_param_dtypes([ddp])
    found = bits(layer.decay)

    late = DistributedDataParallel(config, DistributedDataParallelConfig(), Layer().bfloat16())
    try:
        enforce_marked_param_dtypes([late])
    except ValueError as error:
        return found, str(error), names
    return found, "", names


@pytest.mark.parametrize("replace", [False, True])
def test_megatrons_wrappers_keep_the_bits(replace):
    ((found, error, names),) = run(1, wrapped_by_megatron, replace)
    assert found == bits(FINE)
    assert names == ["module.module.decay"]
    assert "DDP holds it: enforce before wrapping with DDP" in error


def run_documented_example(text: str) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    exec(compile(code, "docs/precision.md", "exec"), {"__name__": "documented"})


def test_the_documented_example_runs():
    page = Path(__file__).parents[2] / "docs" / "precision.md"
    run(1, run_documented_example, page.read_text(encoding="utf-8"))
