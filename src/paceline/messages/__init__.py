"""The messages of the REST API, shared by runner, master and client.

Import from the modules: `states` (enumerations), `resources` (pydantic models, for people and
programs) and `attempts` (plain structs between a runner and the master, which start fast).
"""
