"""What this process was asked to do: its environment, other libraries' registries and functions."""
