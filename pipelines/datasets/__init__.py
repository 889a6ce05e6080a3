"""TFDS builders that ship with the package, each in its own module with its data beside it."""
