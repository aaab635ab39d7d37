// What scrolls sideways, code and tables, can be reached and scrolled by keyboard.
document.addEventListener("DOMContentLoaded", () => {
  for (const each of document.querySelectorAll(".md-typeset pre > code, .highlight-ipynb, .jp-OutputArea-output, .md-typeset__scrollwrap, .md-typeset table:not([class])")) {
    if (each.scrollWidth > each.clientWidth) each.tabIndex = 0;
  }
});
