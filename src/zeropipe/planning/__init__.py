"""What to run: layouts, schedules, microbatches, checkpointing and cuts, tried, ranked and explained."""
