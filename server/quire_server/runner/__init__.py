"""Executes Steps: everything in the engine process that owns a tensor. A Step goes in, a StepResult comes
out.
"""
