"""A user's script in which type checkers must find an error on every marked line, and on no other."""

import foredraft

g = foredraft.load("sample", "none")
foredraft.load("sample", drfter="none")  # error
foredraft.load("sample", max_batch_size="4")  # error
foredraft.load_many("sample", ["none"], policy=None)  # error
foredraft.speculative("auto", verifer="block")  # error
g.generate("one", temprature=1.0)  # error
g.generate("one", temperature="hot")  # error
g.generate("one").text.temperature  # error
g.generate(["one", "two"]).text  # error
g.generate("one", num_return_sequences=2).text  # error
g.generate(None)  # error
g.batch(["one"], max_tokens=3)  # error
g.stream("one", max_new_token=3)  # error
g.stream("one").results  # error
g.astream("one", top_p="0.9")  # error
g.as_completed(["one"], progres=print)  # error
g.beam_search("one", num_beam=2)  # error
g.beam_search("one", temperature=1.0)  # error
g.beam_search(["one"])[0].tokens  # error
foredraft.SamplingParams(temprature=1.0)  # error
foredraft.laod("sample")  # error


async def run() -> None:
    await g.agenerate("one", temprature=1.0)  # error
    (await g.agenerate(["one"])).text  # error
    for piece in g.astream("one"):  # error
        print(piece)
