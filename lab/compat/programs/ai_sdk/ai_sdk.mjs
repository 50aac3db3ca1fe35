// Vercel's AI SDK: texts, streams, tools and objects. It prints one line of JSON for each check, as checks.py does.
import assert from "node:assert";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "pdserve",
  baseURL: `${url}/v1`,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const settings = { model: provider(name), temperature: 0, maxOutputTokens: 200, maxRetries: 0 };
const question = "What is the capital of France? Answer in one sentence.";
const city = z.object({ name: z.string().max(40), country: z.string().max(40) });
const weather = tool({ description: "The weather of a city", inputSchema: z.object({ city: z.string().max(40) }) });

const checks = {
  async text() {
    const answer = await generateText({ ...settings, prompt: question });
    assert.match(answer.text, /Paris/);
    assert.ok(answer.usage.outputTokens > 0);
  },
  async stream() {
    const answer = streamText({ ...settings, prompt: question });
    const pieces = [];
    for await (const piece of answer.textStream) pieces.push(piece);
    assert.match(pieces.join(""), /Paris/);
    assert.ok(pieces.length > 2 && (await answer.usage).outputTokens > 0);
  },
  async tool_call() {
    const asked = { ...settings, prompt: "What is the weather in Paris?", tools: { weather }, toolChoice: "required" };
    const answer = await generateText(asked);
    assert.strictEqual(typeof answer.toolCalls[0].input.city, "string");
  },
  async tool_call_in_a_stream() {
    const asked = { ...settings, prompt: "What is the weather in Paris?", tools: { weather }, toolChoice: "required" };
    const answer = streamText(asked);
    const calls = [];
    for await (const part of answer.fullStream) if (part.type === "tool-call") calls.push(part);
    assert.strictEqual(typeof calls[0].input.city, "string");
  },
  async object() {
    const answer = await generateObject({ ...settings, prompt: question, schema: city });
    city.parse(answer.object);
  },
  async object_in_a_stream() {
    const answer = streamObject({ ...settings, prompt: question, schema: city });
    for await (const part of answer.partialObjectStream) assert.ok(part);
    city.parse(await answer.object);
  },
};

for (const [test, check] of Object.entries(checks)) {
  let message = "";
  try {
    await check();
  } catch (error) {
    message = `${error.name}: ${error.message}`.slice(0, 1000);
  }
  console.log(JSON.stringify({ test, outcome: message ? "failed" : "passed", message }));
}
