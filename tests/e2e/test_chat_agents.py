"""Runs on agents that are written against the OpenAI client, in worker processes."""

import json
import math

AGENT = '''
async def solve(client, model, row):
    """Ask twice; a third of the reward for each digit in the two answers, up to three."""
    messages, texts = [{"role": "user", "content": row["prompt"]}], []
    for question in ("1+", None):
        answer = (await client.chat.completions.create(model=model, messages=messages)).choices[0].message
        texts.append(answer.content)
        messages += [answer, {"role": "user", "content": question}]
    num_digits = sum(letter.isdigit() for letter in "".join(texts))
    return {"reward": min(num_digits, 3) / 3, "info": {"digits": num_digits}}
'''
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% if m['role'] != 'assistant' %}={% endif %}{% endfor %}"


def test_an_agent_of_the_openai_client_is_trained(make_config, train_here, tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    config = make_config(
        tmp_path,
        run={"eval_every_steps": 0},
        prompts={"chat": True, "template_path": str(tmp_path / "template.json")},
        reward={"functions": []},
        environment={
            "name": "chat_agent",
            "arguments": {"agent": f"{tmp_path / 'agent.py'}:solve"},
            "max_turn_tokens": 4,
        },
    )
    run = train_here(config)
    assert all(math.isfinite(value) for row in run.metrics for value in row.values())
    assert {row["environment/turns"] for row in run.metrics} == {2.0}
    responses = [response for step in run.rollouts for response in step]
    assert len(responses) == 2 * 8
    for response in responses:
        first, observation, last = response["turns"]
        assert [turn["role"] for turn in response["turns"]] == ["assistant", "user", "assistant"]
        assert observation["text"] == "1+="
        num_digits = sum(letter.isdigit() for letter in first["text"] + last["text"])
        assert (first["reward"], last["reward"]) == (0.0, min(num_digits, 3) / 3)
        assert response["counts"]["environment/info/digits"] == num_digits
        assert response["num_tokens"] == first["num_tokens"] + last["num_tokens"]
