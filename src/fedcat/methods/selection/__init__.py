"""Client selection: who trains next."""

from fedcat.methods.selection.base import SELECTORS, FunctionSelector, Selector, check_selection, make_selector, uniform

__all__ = ["SELECTORS", "FunctionSelector", "Selector", "check_selection", "make_selector", "uniform"]
