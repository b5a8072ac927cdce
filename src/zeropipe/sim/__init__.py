"""What a schedule would take: costs, the simulator, memory over time."""
