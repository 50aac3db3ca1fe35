"""Makes the grammars of answers whose calls have to follow their functions' schemas, in the form that the model writes.

``tool_grammar`` says what stands around calls: reasoning, free text and markers. It has the forms that are JSON, tags
or Harmony's messages, too; ``python_form`` has the others. A form says how a call reads, so that the parser of the same
form in ``pdserve.api.message`` reads it back.
"""
