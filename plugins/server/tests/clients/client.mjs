// What the package openai for Node makes of a server: one JSON object on standard output.
import OpenAI from "openai";

const { baseURL, messages, tool } = JSON.parse(process.argv[2]);
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
const asked = { model: "smollm2", messages, temperature: 0, max_completion_tokens: 12 };
const got = {};

got.models = (await client.models.list()).data.map((model) => model.id);
const whole = await client.chat.completions.create(asked);
got.whole = whole.choices[0].message.content;

got.streamed = "";
const stream = await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) {
  got.streamed += chunk.choices[0]?.delta?.content ?? "";
  got.usage = chunk.usage ?? got.usage;
}

const schema = {
  type: "object",
  properties: { name: { enum: ["Ann", "Bo"] } },
  required: ["name"],
  additionalProperties: false,
};
const format = { type: "json_schema", json_schema: { name: "person", schema, strict: true } };
const person = await client.chat.completions.create({ ...asked, max_completion_tokens: 60, response_format: format });
got.person = person.choices[0].message.content;

const runner = client.chat.completions.stream({
  ...asked, max_completion_tokens: 80, tools: [tool], tool_choice: "required", parallel_tool_calls: false,
});
const called = await runner.finalMessage();
got.call = { name: called.tool_calls[0].function.name, arguments: called.tool_calls[0].function.arguments };

got.embedding = (await client.embeddings.create({ model: "minilm", input: "A cat" })).data[0].embedding;

try {
  await client.chat.completions.create({ ...asked, model: "gpt-9" });
} catch (error) {
  got.error = { status: error.status, code: error.code };
}

const left = await client.chat.completions.create({ ...asked, max_completion_tokens: 500, stream: true });
for await (const _ of left) break;
got.aborted = left.controller.signal.aborted;

process.stdout.write(JSON.stringify(got));
