"use strict";
const filter = document.getElementById("filter");
const transactions = document.querySelectorAll("#attention > tbody");

function apply() {
  let shown = 0;
  for (const transaction of transactions) {
    transaction.hidden = [...filter.querySelectorAll("select")].some(
      ({ name, value }) => value && !transaction.dataset[name].split(" ").includes(value));
    shown += !transaction.hidden;
  }
  filter.querySelector("output").value = `${shown} of ${transactions.length} shown`;
}

filter.addEventListener("change", apply);
filter.hidden = false;
apply();
