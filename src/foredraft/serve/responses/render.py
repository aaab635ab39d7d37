"""From results and updates to answers and events of ``/v1/responses``."""

import json
from collections.abc import Iterable, Iterator, Sequence as Seq
from dataclasses import dataclass, field
from itertools import count
from typing import Any, final

from foredraft.engine.results import Result
from foredraft.serve.answers import Answer, TokenLogprob, Usage
from foredraft.serve.errors import ApiError
from foredraft.serve.render import Turn, TurnRenderer
from foredraft.serve.responses.answers import (
    ArgumentsEvent,
    Event,
    Failure,
    Incomplete,
    InputDetails,
    Item,
    ItemEvent,
    Output,
    OutputCall,
    OutputDetails,
    OutputMessage,
    OutputReasoning,
    OutputText,
    PartEvent,
    ReasoningEvent,
    ReasoningText,
    Response,
    ResponseEvent,
    ResponseUsage,
    Status,
    TextEvent,
)
from foredraft.serve.responses.schema import ResponsesRequest
from foredraft.serve.updates import Update


@final
@dataclass
class ResponseRenderer(TurnRenderer):
    """Answers of ``/v1/responses``: one output, as reasoning, a message and calls, those that there are.

    ``repeated``: see ``Response``.
    """

    prefix = "resp"
    repeated: str = field(kw_only=True)
    _numbers: Iterator[int] = field(default_factory=count, init=False)  # of events
    _thought: str = field(default="", init=False)  # reasoning until now
    _thinking: bool = field(default=False, init=False)  # its item is open
    _said: str = field(default="", init=False)  # text streamed until now
    _logged: list[TokenLogprob] = field(default_factory=list, init=False)  # until now
    _unsent: list[TokenLogprob] = field(default_factory=list, init=False)  # of tokens without text of their own
    _output: Output = field(default_factory=list, init=False)  # streamed until now

    def whole(self, results: Seq[Result]) -> Response:
        (result,) = results
        turn = self._read(result.text)
        self._thought = turn.reasoning
        return self._ended(result, self._items(turn, result, self._logprobs(0, result.logprobs)))

    def opening(self) -> Iterable[Event]:
        for name in ("created", "in_progress"):
            yield self._state(name, self._response("in_progress", []))

    def chunks(self, update: Update) -> Iterable[Event]:
        reasoning, text, calls = self._read_more(update)
        new = self._logprobs(0, update.logprobs)
        self._logged += new
        self._unsent += new
        if reasoning:
            yield from self._more_reasoning(reasoning)
        if text or update.result is not None:
            yield from self._end_of_reasoning()
        if text or (update.result is not None and not calls and not self._thought):
            yield from self._more_text(text)
        if update.result is not None:
            self._output = self._items(Turn(self._thought, self._said, calls), update.result, self._logged)
            for place, item in enumerate(self._output):
                if isinstance(item, OutputMessage):
                    yield from self._end_of_message(item)
                elif isinstance(item, OutputCall):
                    yield from self._call(place, item)

    def closing(self, results: Seq[Result]) -> Iterable[Event]:
        (result,) = results
        response = self._ended(result, self._output)
        yield self._state(response.status, response)

    def event(self, chunk: Answer) -> str:
        name = f"event: {chunk.type}\n" if isinstance(chunk, Event) else ""
        return name + super().event(chunk)

    def ending(self, error: ApiError | None) -> str:
        if error is None:
            return ""
        code = "invalid_prompt" if error.status == 400 else "server_error"
        said: Output = [self._reasoning("incomplete")] if self._thought else []
        said += [self._message([self._content(self._said, [])], "incomplete")] if self._said else []
        failed = self._response("failed", said, error=Failure(code=code, message=error.message))
        return self.event(self._state("failed", failed))

    def _more_reasoning(self, text: str) -> Iterable[Event]:
        """Its item begins with its first text."""
        where = self._place_of_reasoning()
        if not self._thinking:
            self._thinking = True
            yield self._item("added", 0, self._reasoning("in_progress"))
            yield self._new(
                PartEvent, "content_part.added", **where, part=ReasoningText(type="reasoning_text", text="")
            )
        self._thought += text
        yield self._new(ReasoningEvent, "reasoning_text.delta", **where, delta=text)

    def _end_of_reasoning(self) -> Iterable[Event]:
        if self._thinking:
            self._thinking = False
            item, where = self._reasoning("completed"), self._place_of_reasoning()
            yield self._new(ReasoningEvent, "reasoning_text.done", **where, text=self._thought)
            yield self._new(PartEvent, "content_part.done", **where, part=item.content[0])
            yield self._item("done", 0, item)

    def _more_text(self, text: str) -> Iterable[Event]:
        """The message begins with its first text."""
        if not self._output:
            self._output = [self._message([], "in_progress")]
            yield self._item("added", self._place()["output_index"], self._output[0])
            yield self._part("added", self._content("", []))
        if text:
            self._said += text
            sent, self._unsent = self._unsent, []
            yield self._new(TextEvent, "output_text.delta", **self._place(), delta=text, logprobs=sent)

    def _end_of_message(self, message: OutputMessage) -> Iterable[Event]:
        (part,) = message.content
        yield self._new(TextEvent, "output_text.done", **self._place(), text=part.text, logprobs=part.logprobs)
        yield self._part("done", part)
        yield self._item("done", self._place()["output_index"], message)

    def _call(self, place: int, call: OutputCall) -> Iterable[Event]:
        where = {"item_id": call.id, "output_index": place}
        yield self._item("added", place, call.model_copy(update={"arguments": "", "status": "in_progress"}))
        yield self._new(ArgumentsEvent, "function_call_arguments.delta", **where, delta=call.arguments)
        fields = {"name": call.name, "arguments": call.arguments}
        yield self._new(ArgumentsEvent, "function_call_arguments.done", **where, **fields)
        yield self._item("done", place, call)

    def _items(self, turn: Turn, result: Result, logprobs: list[TokenLogprob]) -> Output:
        """All of the output: reasoning, a message, unless there is only something else, then the calls."""
        items: Output = []
        status = "incomplete" if result.finish_reason == "length" else "completed"
        if turn.reasoning:
            items.append(self._reasoning("completed" if turn.content or turn.calls else status))
        if turn.content or not (turn.calls or turn.reasoning):
            items.append(self._message([self._content(turn.content, logprobs)], status))
        for place, call in enumerate(turn.calls):
            own, called = f"fc_{self.number}_{place}", self._call_id(0, place)
            items.append(
                OutputCall(type="function_call", id=own, call_id=called, **call.model_dump(), status="completed")
            )
        return items

    def _reasoning(self, status: Status) -> OutputReasoning:
        content = [ReasoningText(type="reasoning_text", text=self._thought)] if self._thought else []
        own = self._place_of_reasoning()["item_id"]
        return OutputReasoning(type="reasoning", id=own, summary=[], content=content, status=status)

    def _message(self, content: list[OutputText], status: Status) -> OutputMessage:
        own = self._place()["item_id"]
        return OutputMessage(type="message", id=own, role="assistant", status=status, content=content)

    def _content(self, text: str, logprobs: list[TokenLogprob]) -> OutputText:
        return OutputText(type="output_text", text=text, annotations=[], logprobs=logprobs)

    def _place(self) -> dict[str, Any]:
        """The place of the text: the message is the first item but for reasoning."""
        return {"item_id": f"msg_{self.number}", "output_index": int(bool(self._thought)), "content_index": 0}

    def _place_of_reasoning(self) -> dict[str, Any]:
        return {"item_id": f"rs_{self.number}", "output_index": 0, "content_index": 0}

    def _state(self, name: str, response: Response) -> Event:
        return self._new(ResponseEvent, name, response=response)

    def _item(self, name: str, place: int, item: Item) -> Event:
        return self._new(ItemEvent, f"output_item.{name}", output_index=place, item=item)

    def _part(self, name: str, part: OutputText) -> Event:
        return self._new(PartEvent, f"content_part.{name}", **self._place(), part=part)

    def _new(self, kind: type[Event], name: str, /, **fields: Any) -> Event:
        return kind(type=f"response.{name}", sequence_number=next(self._numbers), **fields)

    def _ended(self, result: Result, output: Output) -> Response:
        cut = result.finish_reason == "length"
        used = self._usage([result])
        return self._response(
            "incomplete" if cut else "completed",
            output,
            incomplete_details=Incomplete(reason="max_output_tokens") if cut else None,
            usage=_usage(used["usage"]),
            metrics=used["metrics"],
            lossless=used["lossless"],
        )

    def _response(self, status: Status, output: Output, **more: Any) -> Response:
        """The response in a state; what ``more`` does not say is null."""
        params = self.job.params
        return Response.repeating(
            self.repeated,
            id=f"{self.prefix}_{self.number}",
            object="response",
            created_at=self.created,
            status=status,
            model=self.model,
            output=output,
            previous_response_id=None,
            reasoning={"effort": None, "summary": None},
            store=False,
            temperature=params.temperature,
            top_p=1.0 if params.top_p is None else params.top_p,
            truncation="disabled",
            **{"error": None, "incomplete_details": None, "usage": None, **more},
        )


def repeated(asked: ResponsesRequest) -> str:
    """What an answer repeats of its body; see ``Response``."""
    text = {"format": {"type": "text"}}
    if asked.text is not None:
        text |= asked.text.model_dump(by_alias=True, exclude_none=True)
    choice = asked.tool_choice or "auto"
    fields = {
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls,
        "text": text,
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in asked.tools or []],
        "top_logprobs": asked.top_logprobs or 0,
    }
    return json.dumps(fields)[1:-1]  # ASCII: the body may hold what is not valid Unicode


def _usage(used: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=used.prompt_tokens,
        input_tokens_details=InputDetails(cached_tokens=used.prompt_tokens_details.cached_tokens, cache_write_tokens=0),
        output_tokens=used.completion_tokens,
        output_tokens_details=OutputDetails(**used.completion_tokens_details.model_dump()),
        total_tokens=used.total_tokens,
    )
