// The OpenAI SDK for Node.js against the gateway, as its users use it. Prints one JSON object for the test to look at.
// Usage: node openai_client.mjs DIRECTORY_WITH_NODE_MODULES BASE_URL MODEL

import { createRequire } from "node:module";

const [, , home, baseURL, model] = process.argv;
const { OpenAI } = createRequire(`${home}/`)("openai");
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Grüße 🙂" }];
const tool = {
  type: "function",
  function: {
    name: "get_weather",
    parameters: { type: "object", properties: { city: { type: "string", enum: ["Oslo"] } }, required: ["city"] },
  },
};

async function errorOf(promise) {
  try {
    await promise;
    return null;
  } catch (error) {
    return { name: error.constructor.name, status: error.status, code: error.code, requestID: error.requestID };
  }
}

const { data: whole, response } = await client.chat.completions.create({ model, messages, max_tokens: 8 }).withResponse();
let streamed = "";
let streamedUsage = null;
const chunks = await client.chat.completions.create({
  model, messages, max_tokens: 8, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of chunks) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  streamedUsage = chunk.usage ?? streamedUsage;
}
const helper = client.chat.completions.stream({ model, messages, max_tokens: 80, tools: [tool], tool_choice: "required" });
const called = (await helper.finalChatCompletion()).choices[0];
const answer = await client.responses.create({ model, input: "Hello", max_output_tokens: 8 });
const kinds = [];
for await (const event of await client.responses.create({ model, input: "Hello", max_output_tokens: 8, stream: true })) {
  kinds.push(event.type);
}
const embedding = (await client.embeddings.create({ model, input: "a" })).data[0].embedding;
const models = [];
for await (const card of client.models.list()) models.push(card.id);

console.log(JSON.stringify({
  whole: whole.choices[0].message.content,
  requestID: whole._request_id,
  trajectory: response.headers.get("x-trajectory-id"),
  streamed,
  usages: [whole.usage.completion_tokens, streamedUsage?.completion_tokens],
  call: called.message.tool_calls[0].function,
  finishReason: called.finish_reason,
  responseText: answer.output_text,
  responseKinds: [kinds[0], kinds.at(-1)],
  embedding: embedding.every((number) => Number.isFinite(number)) && embedding.length,
  models,
  unknownModel: await errorOf(client.chat.completions.create({ model: "nope", messages })),
  badRequest: await errorOf(client.chat.completions.create({ model, messages: "Hello", stream: true })),
}));
