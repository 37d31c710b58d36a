"""Independent numpy references, written from the formulas, not from the package."""
