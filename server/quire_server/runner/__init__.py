"""Step in, StepResult out; everything that owns a tensor."""
