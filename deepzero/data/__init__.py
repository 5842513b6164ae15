"""Text in, batches of token sequences out: floor 4. Nothing here knows ZeRO or communicates."""
