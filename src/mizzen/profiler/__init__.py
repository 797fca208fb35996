"""What a step costs: operations of each module, traces, memory snapshots, and how much of the device is used."""
