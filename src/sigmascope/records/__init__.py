"""What is known of a run, as frozen values that outlive it. No torch here."""
