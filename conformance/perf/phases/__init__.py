"""`conform phases`: prefill and decode by themselves, what they cost in energy, and what each device is good for."""
