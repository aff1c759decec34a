"""The fault drill: a scratch cluster that is hurt on purpose, and a judge of what came of it.

`tocsin verify` tells users what the tests of this repository tell its authors: history.py has what
was seen, judge.py decides, linear.py searches an order of operations, the rest makes it happen.
"""
