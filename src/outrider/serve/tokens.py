"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from outrider.serve import plan
from outrider.serve.errors import bad_request
from outrider.serve.exchange import Exchange
from outrider.serve.schema import DetokenizeRequest, TokenizeRequest, parse
from outrider.serve.service import Service


async def tokenize(service: Service, exchange: Exchange) -> None:
    """The tokens of a text or a conversation."""
    request = parse(TokenizeRequest, exchange.body)
    if (request.prompt is None) == (request.messages is None):
        raise bad_request("give either prompt or messages", param="prompt")
    if request.messages is None:
        text = request.prompt or ""
        tokens = await service.read(lambda: service.text.encode(text), what="prompt")
    else:
        messages = plan.template_messages(
            request.messages,
            limits=service.config.limits,
            tools=plan.ToolPlan(),
            told_by_template=service.told_by_template,
            tool_format=service.tool_format,
        )
        ready = request.add_generation_prompt is not False
        tokens = await service.read(lambda: service.text.chat(messages, ready), what="messages")
    await exchange.reply(
        {"count": len(tokens), "max_model_len": service.room.context, "tokens": tokens}
    )


async def detokenize(service: Service, exchange: Exchange) -> None:
    """The text of tokens."""
    request = parse(DetokenizeRequest, exchange.body)
    plan.check_tokens(request.tokens, service.room, param="tokens")
    text = await service.read(lambda: service.text.decode(request.tokens), what="tokens")
    await exchange.reply({"prompt": text})
