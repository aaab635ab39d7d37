// Worker: llama.cpp through node-llama-cpp; see protocol.py. Options: modules, model, threads, lookup.
import {openSync, writeSync, closeSync} from "node:fs";
import path from "node:path";
import readline from "node:readline";
import {pathToFileURL} from "node:url";

const options = JSON.parse(process.argv[2]);
const entry = path.join(path.resolve(options.modules), "node-llama-cpp", "dist", "index.js");
const {getLlama, InputLookupTokenPredictor} = await import(pathToFileURL(entry).href);
const seconds = (since) => (performance.now() - since) / 1000;
const write = (line) => process.stdout.write(JSON.stringify(line) + "\n");

const begun = performance.now();
const llama = await getLlama({gpu: false, build: "never", logLevel: "error", maxThreads: options.threads});
const model = await llama.loadModel({modelPath: options.model});
const context = await model.createContext({contextSize: 2048, threads: options.threads});
const sequence = context.getSequence(options.lookup ? {tokenPredictor: new InputLookupTokenPredictor()} : {});
write({load_seconds: seconds(begun)});

async function generate(ids, tokens) {
    await sequence.clearHistory();
    const output = [];
    const started = performance.now();
    let first;
    for await (const token of sequence.evaluate(ids, {temperature: 0, yieldEogToken: true})) {
        first ??= seconds(started);
        if (output.push(token) === tokens)
            break;
    }
    return {output, first_seconds: first, first_tokens: 1, seconds: seconds(started)};
}

async function logits(ids, file) {
    await sequence.clearHistory();
    const out = openSync(file, "w");
    for (const id of ids) { // one by one: a position's logits are a map of the whole vocabulary
        const [found] = await sequence.controlledEvaluate([[id, {generateNext: {logits: true}}]]);
        const row = new Float32Array(found.next.logits.size);
        for (const [token, logit] of found.next.logits)
            row[token] = logit;
        writeSync(out, row);
    }
    closeSync(out);
    return {positions: ids.length};
}

for await (const line of readline.createInterface({input: process.stdin})) {
    const request = JSON.parse(line);
    write(await ("logits" in request ? logits(request.ids, request.logits) : generate(request.ids, request.tokens)));
}
process.exit(0);
