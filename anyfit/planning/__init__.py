"""Profile -> Plan: which choices are legal, what each costs, which is best, and why."""

from .search import search as search
