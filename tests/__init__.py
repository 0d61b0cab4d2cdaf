"""Tests of recurrent_gates; one file per module of the library, `golden/` holds numbers from
elsewhere."""
