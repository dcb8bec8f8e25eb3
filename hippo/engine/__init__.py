"""What the draft and the target service share: slots, device thread, streams and assembly."""
