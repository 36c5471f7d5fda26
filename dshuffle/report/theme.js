// Bokeh draws on canvas, which style sheets do not reach: give its models the page's own colours.
(function () {
  "use strict";
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  function models() {
    return window.Bokeh.documents.flatMap((doc) => [...doc._all_models.values()]);
  }
  // Each colour of a white page has one for dark pages; see colours.py, which defines darkColours.
  function shade(colour) {
    for (const [light, darker] of Object.entries(darkColours)) {
      if (colour === light || colour === darker) {
        return dark.matches ? darker : light;
      }
    }
    return colour;
  }
  function recolour(model) {
    for (const name of ["fill_color", "line_color", "hatch_color"]) {
      if (name in model.properties && model[name] !== null) {
        const colour = model[name];
        const plain = typeof colour === "string" ? colour : colour.value;
        if (typeof plain === "string" && shade(plain) !== plain) {
          model[name] = typeof colour === "string" ? shade(plain) : { ...colour, value: shade(plain) };
        }
      }
    }
    if (model.type === "ColumnDataSource" && "colour" in model.data) {
      model.data = { ...model.data, colour: Array.from(model.data.colour, shade) };
    }
  }
  function paint() {
    const page = getComputedStyle(document.documentElement);
    const [ink, soft, line, card] = ["--ink", "--soft", "--line", "--card"].map(
      (name) => page.getPropertyValue(name).trim()
    );
    for (const model of models()) {
      recolour(model);
      if ("axis_label_text_color" in model.properties) {
        model.setv({
          axis_label_text_color: soft, major_label_text_color: soft,
          axis_line_color: line, major_tick_line_color: line, minor_tick_line_color: null,
        });
        if ("group_text_color" in model.properties) {
          model.setv({ group_text_color: soft, separator_line_color: null });
        }
      } else if (model.type === "Grid" && model.grid_line_color !== null) {
        model.setv({ grid_line_color: line });
      } else if (model.type === "Figure" || model.type === "Plot") {
        model.setv({ background_fill_color: null, border_fill_color: null, outline_line_color: null });
      } else if (model.type === "LabelSet") { // names and numbers may stand on lines
        model.setv({ text_color: ink, background_fill_color: card });
      } else if (model.type === "Title") {
        model.setv({ text_color: ink });
      } else if (model.type === "Legend") {
        model.setv({ label_text_color: soft, background_fill_color: card, border_line_color: null });
      } else if (model.type === "Span") {
        model.setv({ line_color: soft });
      }
    }
  }
  // Each button in the key of a line chart shows or hides the line with its name.
  function listen() {
    for (const button of document.querySelectorAll("figure button[data-line]")) {
      button.addEventListener("click", function () {
        const shown = button.getAttribute("aria-pressed") !== "true";
        const name = button.dataset.line;
        for (const other of document.querySelectorAll("figure button[data-line]")) {
          if (other.dataset.line === name) {
            other.setAttribute("aria-pressed", String(shown));
          }
        }
        for (const model of models()) {
          if (model.type === "GlyphRenderer" && model.name === "line: " + name) {
            model.visible = shown;
          }
        }
      });
    }
  }
  function start() {
    if (window.Bokeh && window.Bokeh.documents.length > 0) {
      paint();
      listen();
      dark.addEventListener("change", paint);
    } else {
      window.setTimeout(start, 30);
    }
  }
  start();
  // Charts are drawn while their section is open, as a closed one has no width; then the details are folded.
  window.addEventListener("load", function () {
    window.setTimeout(function () {
      for (const section of document.querySelectorAll("details")) {
        section.open = false;
      }
    }, 500);
  });
})();
