"""Our schedules in other people's trainers. Nothing is imported before it is asked for:

torchtitan  `pipeline_llm` in place of its own
archon      `install()` for AReaL's Archon engine
chosen      the schedule that a framework's config names
"""
