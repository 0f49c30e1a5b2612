"""Formulas of the question bank: arithmetic over a question's values, and nothing else.

Python's own parser reads them, and only what stands below is let through: numbers, values by name, a few operators and
functions, and the sizes of known models (`model.n_layers`). So a bank from somebody else runs no code.
"""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from minillm.config import Config
from minillm.errors import InputError

Value = int | float | str


def model(
    vocab_size: int, d_model: int, n_layers: int, n_heads: int, n_kv_heads: int, d_ff: int, tied: bool, context: int
) -> Config:
    """All of those below have d_model / n_heads numbers in a head."""
    head_dim = d_model // n_heads
    return Config(
        vocab_size, d_model, n_layers, n_heads, n_kv_heads, head_dim, d_ff, 1e-5, 10_000.0, context, tied=tied
    )


# as their config.json files say; theta and eps are in no formula
MODELS = {
    "SmolLM2-135M": model(49_152, 576, 30, 9, 3, 1_536, True, 8_192),
    "SmolLM2-360M": model(49_152, 960, 32, 15, 5, 2_560, True, 8_192),
    "SmolLM2-1.7B": model(49_152, 2_048, 24, 32, 32, 8_192, True, 8_192),
    "Llama-3.2-1B": model(128_256, 2_048, 16, 32, 8, 8_192, True, 131_072),
    "Mistral-7B": model(32_000, 4_096, 32, 32, 8, 14_336, False, 32_768),
    "Llama-2-7B": model(32_000, 4_096, 32, 32, 32, 11_008, False, 4_096),
}


def layer_weights(c: Config) -> int:
    """Weights of the Linears of all layers, without norms."""
    attention = 2 * (c.n_heads + c.n_kv_heads) * c.head_dim * c.d_model
    return c.n_layers * (attention + 3 * c.d_ff * c.d_model)


def parameters(c: Config) -> int:
    """All numbers of the model; a tied head is the embedding."""
    tables = 1 if c.tied else 2
    return layer_weights(c) + tables * c.vocab_size * c.d_model + (2 * c.n_layers + 1) * c.d_model


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ceil": math.ceil,
    "floor": math.floor,
    "exp": math.exp,
    "sqrt": math.sqrt,
    "min": min,
    "max": max,
    "round": round,
    "kv_bytes_per_token": Config.kv_bytes_per_token,
    "layer_weights": layer_weights,
    "parameters": parameters,
}
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
SIZES = frozenset(field.name for field in fields(Config))


def evaluate(formula: str, values: Mapping[str, Value]) -> Any:
    """The result of a formula. Raises InputError for one that is not arithmetic, or has none."""
    try:
        return _value(ast.parse(" ".join(formula.split()), mode="eval").body, values)
    except (SyntaxError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"formula {formula!r} with {dict(values)} has no value: {error}") from error


def _value(node: ast.expr, values: Mapping[str, Value]) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.Name(id=name) if name in values:
            value = values[name]
            return MODELS.get(value, value) if isinstance(value, str) else value
        case ast.Attribute(value=ast.Name(id=name), attr=size) if size in SIZES and values.get(name) in MODELS:
            return getattr(MODELS[str(values[name])], size)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left, values), _value(right, values))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in OPERATORS:
            return int(OPERATORS[type(op)](_value(left, values), _value(right, values)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, values)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            return FUNCTIONS[name](*(_value(arg, values) for arg in args))
    known = ", ".join([*values, *FUNCTIONS])
    raise InputError(
        f"{ast.unparse(node)!r} is not allowed in a formula; numbers, + - * / // %, comparisons, {known} are"
    )


def show(value: Any) -> str:
    """For people: whole numbers with commas, others with four digits that count."""
    if isinstance(value, str):
        return value
    if isinstance(value, Config):
        return next(name for name, config in MODELS.items() if config is value)
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def filled(text: str, values: Mapping[str, Value]) -> str:
    """The text with each {formula} replaced by its result."""
    return re.sub(r"\{([^{}]+)\}", lambda found: show(evaluate(found[1], values)), text)
