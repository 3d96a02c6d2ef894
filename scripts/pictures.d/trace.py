"""docs/pictures/trace.png: the page of `vramctl trace`, of an engine and a trainer that take turns on a GPU."""

import json
import time

#: A tag may have any name.
NASTY = "</script><b>optimizer"
#: How many of the canvas's pixels have a colour.
COUNT = """([r, g, b]) => {
  const canvas = document.querySelector("canvas");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let count = 0;
  for (let i = 0; i < data.length; i += 4)
    count += Math.abs(data[i] - r) + Math.abs(data[i + 1] - g) + Math.abs(data[i + 2] - b) < 12 && data[i + 3] > 128;
  return count;
}"""


def take_turns(place):
    """An engine and a trainer, whose pauses copy little."""
    place.build("churn")
    options = {"SIMGPU_LINK": "2G"}
    program = ["--no-python", "--", place.apps / "engine_regions", "--weights-mib", 384, "--kv-mib", 384]
    engine = place.start("run", "--trace", "--name", "engine", *program, **options)
    program = ["--no-python", "--", place.apps / "churn"]
    trainer = place.start("run", "--trace", "--name", "trainer", "--tag", "optimizer", *program, **options)
    for _ in range(3):
        place.ask(engine, "generate 1")
        time.sleep(0.5)
        place.vramctl("pause", "--name", "engine")
        for _ in range(10):
            place.ask(trainer, "60")
            time.sleep(0.05)
        place.vramctl("pause", "--name", "trainer")
        place.vramctl("resume", "--name", "engine")
        time.sleep(0.5)
        place.vramctl("resume", "--name", "trainer")
    return trainer


def make(place):
    trainer = take_turns(place)
    said = place.vramctl("trace", "-o", place.folder / "page.html")
    assert "2 processes" in said, said
    # Both show the same events.
    place.vramctl("trace", "-o", place.folder / "trace.json")
    trace = json.loads((place.folder / "trace.json").read_text())["traceEvents"]
    place.vramctl("set-tag", "--name", "trainer", NASTY)
    place.ask(trainer, "60")
    place.vramctl("trace", "--name", "trainer", "-o", place.folder / "nasty.html")

    with place.browser() as browser:
        page = browser.new_page()
        page.set_viewport_size({"width": 1100, "height": 800})
        wrong, asked = [], []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: message.type == "error" and wrong.append(message.text))
        page.on("request", lambda request: asked.append(request.url))
        address = f"file://{place.folder}/page.html"
        page.goto(address)
        page.wait_for_selector("canvas")
        assert asked == [address], f"the page asks for {asked}"
        look(page, trace)
        page.screenshot(path=place.picture("trace.png"))
        page.goto(f"file://{place.folder}/nasty.html")
        page.wait_for_selector("canvas")
        assert NASTY in page.inner_text("body") and page.locator("b").count() == 0, "a tag's name is taken for HTML"
        assert not wrong, wrong


def look(page, trace):
    text = page.inner_text("body")
    assert all(name in text for name in ("engine: weights", "engine: kv_cache", "trainer: optimizer")), text
    slices = [event for event in trace if event["ph"] == "X" and event["cat"] == "transition"]
    assert page.locator("#events tr").count() == 1 + len(slices), text
    # The chart adds up, and ends with the same values as the trace.
    bytes_ = page.evaluate("data.gpus[0].bytes.map((line) => line.at(-1))")
    last = page.evaluate("charts[0].data.slice(1).map((line) => line.at(-1))")
    counters = {(event["pid"], event["name"]): event["args"]["bytes"] for event in trace if event["ph"] == "C"}
    assert sum(bytes_) == sum(counters.values()) == max(last), (bytes_, last, counters)
    # Each owner's colour is visible, and disappears with the owner.
    colours = [[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in page.evaluate("colours")]
    for number in range(len(bytes_)):
        assert page.evaluate(COUNT, colours[number]) > 200, f"{number} is not drawn"
    switch = page.locator(".u-legend .u-series").nth(1)
    switch.click()
    page.wait_for_function("!charts[0].series[1].show")
    page.wait_for_timeout(200)
    assert page.evaluate(COUNT, colours[0]) == 0, "what is switched off is drawn"
    others = page.evaluate("charts[0].data.slice(2).map((line) => line.at(-1))")
    assert max(others) == sum(bytes_[1:]), (others, bytes_)
    switch.click()
    # Over a pause, the tooltip names the process.
    box = page.locator(".u-over").bounding_box()
    middle = page.evaluate("charts[0].valToPos((data.slices[0].from + data.slices[0].to) / 2, 'x')")
    page.mouse.move(box["x"] + middle, box["y"] + 40)
    page.wait_for_function("document.querySelector('.now').textContent.includes('engine: pause of')")
    # Zoom in and out.
    page.mouse.move(box["x"] + 100, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 400, box["y"] + 60)
    page.mouse.up()
    whole = page.evaluate("data.gpus[0].times.at(-1)")
    page.wait_for_function("(whole) => charts[0].scales.x.max - charts[0].scales.x.min < whole / 2", arg=whole)
    page.mouse.dblclick(box["x"] + 300, box["y"] + 60)
    page.wait_for_function("(whole) => charts[0].scales.x.max - charts[0].scales.x.min > whole * 0.99", arg=whole)
    page.mouse.move(5, 5)
    page.wait_for_timeout(200)
