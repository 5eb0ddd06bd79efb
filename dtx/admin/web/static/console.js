// Every page works without this script. It updates pages, copies text, and shows orders in a dialogue.
"use strict";

const say = (text) => {
  const place = document.getElementById("say");
  if (place.textContent !== text) place.textContent = text;
};

// -- copying

const enliven = (root) => {
  if (navigator.clipboard) for (const button of root.querySelectorAll("button[data-copy]")) button.hidden = false;
  for (const box of root.querySelectorAll("[data-tick-all]")) box.hidden = false;
};

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-copy]");
  if (!button) return;
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
    say("Copied");
    button.firstChild.textContent = "Copied";
  } catch {
    say("The browser does not permit copying");
    button.firstChild.textContent = "Not copied";
  }
  setTimeout(() => { button.firstChild.textContent = "Copy"; }, 2000);
});

document.addEventListener("change", (event) => {
  if (!event.target.matches("[data-tick-all]")) return;
  for (const box of document.querySelectorAll("td.tick input")) box.checked = event.target.checked;
});

// -- orders in a dialogue, which shows the main part of their pages

const dialog = document.createElement("dialog");
dialog.setAttribute("aria-labelledby", "headline");
document.body.append(dialog);
let opener = null;

const present = (text) => {
  const part = new DOMParser().parseFromString(text, "text/html").querySelector("[data-dialog-body]");
  if (!part) return false;
  dialog.replaceChildren(document.adoptNode(part));
  enliven(dialog);
  if (!dialog.open) dialog.showModal();
  const first = dialog.querySelector("[role=alert]") || dialog.querySelector("form :is(input:not([type=hidden]), select, textarea)") || dialog;
  if (!first.matches("input, select, textarea")) first.tabIndex = -1;
  first.focus();
  return true;
};

document.addEventListener("click", async (event) => {
  const link = event.target.closest("a[data-dialog]");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  event.preventDefault();
  opener = link.id;
  try {
    const answer = await fetch(link.href, { headers: { Accept: "text/html", "X-Dtx-Part": "dialog" } });
    if (answer.redirected || !present(await answer.text())) location.assign(link.href);
  } catch {
    location.assign(link.href);
  }
});

dialog.addEventListener("click", (event) => {
  if (!event.target.closest("[data-dialog-close]")) return;
  event.preventDefault();
  dialog.close();
});

dialog.addEventListener("close", () => {
  dialog.replaceChildren();
  if (opener) document.getElementById(opener)?.focus();
});

dialog.addEventListener("submit", async (event) => {
  const form = event.target;
  event.preventDefault();
  const data = new URLSearchParams(new FormData(form, event.submitter));
  const buttons = form.querySelectorAll("button");
  for (const button of buttons) button.disabled = true;
  try {
    const answer = await fetch(form.getAttribute("action"), { method: "POST", body: data, headers: { Accept: "text/html", "X-Dtx-Part": "dialog" } });
    if (answer.redirected) { location.assign(answer.url); return; }
    if (present(await answer.text())) return;
    say("The order was not accepted: open the page again");
  } catch {
    say("dtx does not answer: it is not known whether the order was carried out, open the page again");
    const note = document.createElement("p");
    note.className = "note bad";
    note.setAttribute("role", "alert");
    note.textContent = "dtx does not answer. It is not known whether the order was carried out: open the page again.";
    form.prepend(note);
  }
  for (const button of buttons) button.disabled = false;
});

// -- live updates

const watched = document.body.dataset.live;
const mark = document.getElementById("live-mark");
const word = document.getElementById("live-word");
const pause = document.getElementById("live-pause");
let source = null;
let seen;
let paused = false;
let busy = false;
let wanted = false;
let pauseUntil = 0; // pages that take long are updated less often: dtx makes them a fifth of the time at most

const tell = (text, good) => {
  word.textContent = text;
  mark.classList.toggle("off", !good);
};

// An update does not change ticks, open details, focus and selected text.
const exchange = (old, fresh) => {
  const selection = getSelection();
  if (!selection.isCollapsed && old.contains(selection.anchorNode)) return;
  const ticked = [...old.querySelectorAll("input:checked")].map((box) => box.id);
  const open = [...old.querySelectorAll("details[open]")].map((item) => item.id);
  const focus = old.contains(document.activeElement) ? document.activeElement.id : null;
  if (old.contains(document.activeElement) && !focus && document.activeElement !== old) return;
  const scrolled = [old, ...old.querySelectorAll(".wide")].map((box) => box.scrollLeft);
  old.replaceChildren(...fresh.childNodes);
  enliven(old);
  [old, ...old.querySelectorAll(".wide")].forEach((box, index) => { box.scrollLeft = scrolled[index] || 0; });
  for (const id of ticked) { const box = document.getElementById(id); if (box) box.checked = true; }
  for (const id of open) { const item = document.getElementById(id); if (item) item.open = true; }
  if (focus) document.getElementById(focus)?.focus({ preventScroll: true });
};

const refresh = async () => {
  if (busy) { wanted = true; return; }
  busy = true;
  const begun = performance.now();
  try {
    const answer = await fetch(location.href, { headers: { Accept: "text/html", "X-Dtx-Part": "live" } });
    if (answer.redirected) { stop(); tell("signed out: reload to sign in", false); say("Signed out"); return; }
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (paused) return; // the request was sent before the pause
    for (const old of document.querySelectorAll("[data-region]")) {
      const fresh = page.getElementById(old.id);
      if (!fresh) continue;
      if (old.innerHTML !== fresh.innerHTML) exchange(old, fresh);
      if (fresh.dataset.say && fresh.dataset.say !== old.dataset.say) {
        old.dataset.say = fresh.dataset.say;
        say(fresh.dataset.say);
      }
    }
    tell("live", true);
  } catch {
    if (!paused) tell("dtx does not answer", false);
  } finally {
    busy = false;
    pauseUntil = performance.now() + 4 * (performance.now() - begun);
    if (wanted && !paused) refresh();
    wanted = false;
  }
};

const stop = () => { source?.close(); source = null; };

const start = () => {
  if (source || paused || document.hidden) return;
  source = new EventSource(document.body.dataset.events);
  source.addEventListener("beat", (event) => {
    const now = JSON.parse(event.data)[watched];
    tell("live", true);
    // Different for the first event too: data may have changed since the page was loaded.
    if (seen === now || busy || performance.now() < pauseUntil) return;
    seen = now;
    refresh();
  });
  source.addEventListener("signed-out", () => { stop(); tell("signed out: reload to sign in", false); say("Signed out"); });
  source.addEventListener("error", () => {
    tell("not connected", false);
    if (source?.readyState === EventSource.CLOSED) { stop(); setTimeout(start, 5000); refresh(); }
  });
};

if (watched && window.EventSource) {
  mark.hidden = pause.hidden = false;
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.textContent = paused ? "Resume" : "Pause";
    if (paused) { stop(); tell("paused", false); } else { start(); refresh(); }
  });
  // A browser has few connections to one host, so hidden pages close theirs.
  document.addEventListener("visibilitychange", () => { if (document.hidden) stop(); else { start(); refresh(); } });
  start();
}
enliven(document);
