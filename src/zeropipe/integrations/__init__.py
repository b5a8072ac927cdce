"""zeropipe's schedules in other training frameworks; each module imports its framework.

torchtitan: `pipeline_llm`, which replaces torchtitan's own
automodel: `install()` for NeMo Automodel's pipelines
verl: the strategy "zeropipe" of verl's training engines
archon: `install()` for AReaL's Archon engine
trainer: `pipelined`, for transformers.Trainer and trl.SFTTrainer
experts: their mixture-of-experts layers, registered for split backward
schedule_choice: the schedule that a framework's config names
"""
