"""The operator's errors, in one tree. Every layer raises subclasses of QuireOperatorError.

QuireOperatorError
├── SettingsError    the operator's own environment is wrong: the process must not start
├── QuantityError    a string is not a Kubernetes quantity
└── SpecError        the user's LLMDeployment is wrong: no retry will help until it is edited
"""

from __future__ import annotations


class QuireOperatorError(Exception):
    """Base of all errors that the operator raises deliberately."""


class SettingsError(QuireOperatorError):
    """An environment variable of the operator is missing or has an unusable value."""


class QuantityError(QuireOperatorError):
    """The text is not a quantity such as 500m, 2 or 4Gi."""


class SpecError(QuireOperatorError):
    """A field of an LLMDeployment cannot be used. `field_path` reads like spec.engine.env[0].name."""

    def __init__(self, field_path: str, message: str) -> None:
        super().__init__(f"{field_path}: {message}")
        self.field_path = field_path
        self.message = message
