// Bokeh draws on canvas, which style sheets do not reach: give axes and grids the page's own colours.
(function () {
  "use strict";
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  function paint() {
    const page = getComputedStyle(document.documentElement);
    const soft = page.getPropertyValue("--soft").trim();
    const line = page.getPropertyValue("--line").trim();
    for (const doc of window.Bokeh.documents) {
      for (const model of doc._all_models.values()) {
        if (model.name === "axis") {
          model.setv({
            axis_label_text_color: soft, major_label_text_color: soft,
            axis_line_color: line, major_tick_line_color: line,
          });
          if ("group_text_color" in model.properties) {
            model.setv({ group_text_color: soft, separator_line_color: null });
          }
        } else if (model.name === "grid") {
          model.setv({ grid_line_color: line });
        }
      }
    }
  }
  function start() {
    if (window.Bokeh && window.Bokeh.documents.length > 0) {
      paint();
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
