"""What differs between the families: prompt, pixels and vision tower."""
