"""What works on the machine or cluster that a run is going to use."""
