// Runs before the page is drawn, so that a chosen theme does not flash. Without a choice the system decides.
"use strict";

(() => {
  const NAME = "modelbay-theme";
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const shown = () => root.dataset.theme ?? (dark.matches ? "dark" : "light");

  // Browsers that keep nothing for this page throw.
  const kept = () => { try { return localStorage.getItem(NAME); } catch { return null; } };
  const keep = (theme) => { try { localStorage.setItem(NAME, theme); } catch { /* it lasts as long as the page */ } };

  if (["dark", "light"].includes(kept())) root.dataset.theme = kept();

  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const tell = () => button.setAttribute("aria-pressed", String(shown() === "dark"));
    button.addEventListener("click", () => {
      root.dataset.theme = shown() === "dark" ? "light" : "dark";
      keep(root.dataset.theme);
      tell();
    });
    dark.addEventListener("change", tell);
    tell();
  });
})();
