"""Simulated mixtures: gateway, composers and expert workers in production shells; start with `mixture_cluster`."""
